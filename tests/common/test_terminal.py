"""A console's lists: a table where every word fits, else lines. Not covered: colours, which commands print lists."""

from verl_clipx.common.terminal import TerminalConsole


def shown(width, rows):
    console = TerminalConsole(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print_list("things", ("name", "what"), rows, "the end")
    return captured.get()


def test_a_table_where_every_word_fits_and_lines_where_one_does_not():
    rows = [("a" * 20, "short words only"), ("b", "")]
    # 20 and 5 characters, two borders of 3 and the last line.
    assert "┃" in shown(32, rows) and "│ " + "a" * 20 + " │" in shown(32, rows)
    narrow = shown(31, rows)
    assert "┃" not in narrow
    assert narrow.splitlines() == ["things", "a" * 20, "    what: short words only", "b", "the end"]
    # No line of a table is longer than the console.
    long = shown(40, [("name_of_a_thing", "some words " * 20), ("b", "x")])
    assert max(map(len, long.splitlines())) == 40
