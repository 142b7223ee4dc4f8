# shellcheck shell=bash
# Sourced by the recipes: folders and names as Hydra takes them for text.

# A value as Hydra reads it: quoted, unless it is a plain path or name of letters, which no number or null looks like.
text() {
    local LC_ALL=C
    if [[ $1 =~ ^[A-Za-z/][A-Za-z0-9_./-]*$ && $1 == *[/_.-]* ]]; then
        printf '%s\n' "$1"
    else
        printf "'%s'\n" "${1//\'/\\\'}"
    fi
}
