# shellcheck shell=bash
# Sourced by the recipes: folders and names as Hydra takes them for text, and a command as a shell takes it back.

# A value as Hydra reads it: quoted, unless it is a plain path or name of letters, which no number or null looks like.
text() {
    local LC_ALL=C
    if [[ $1 =~ ^[A-Za-z/][A-Za-z0-9_./-]*$ && $1 == *[/_.-]* ]]; then
        printf '%s\n' "$1"
    else
        local rest=$1 quoted='' slashes plain
        # shellcheck disable=SC2016 # the text itself
        while [[ -n $rest ]]; do
            slashes=${rest%%[!\\]*}
            rest=${rest#"$slashes"}
            # Hydra and OmegaConf halve backslashes only before a quote, an interpolation, and at the end.
            [[ -n $rest && $rest != \'* && $rest != '${'* ]] || slashes+=$slashes
            [[ $rest != \'* && $rest != '${'* ]] || slashes+=\\
            plain=${rest%%[\\\'$]*}
            [[ -n $plain ]] || plain=${rest:0:1}
            rest=${rest#"$plain"}
            quoted+=$slashes$plain
        done
        printf "'%s'\n" "$quoted"
    fi
}

# print_command WORD ...: prints a command with a setting a line, to be read and to be pasted.
print_command() {
    local word between=''
    for word; do
        [[ $word != *=* ]] || between=' \\\n    '
        # shellcheck disable=SC2059 # what stands between two words
        printf "$between"
        printf '%q' "$word"
        between=' '
    done
    printf '\n'
}
