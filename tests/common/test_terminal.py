"""A console's lists: a table where every word fits, else lines. Not covered: colours, which commands print lists."""

from verl_clipx.common.terminal import TerminalConsole


def print_list(width, rows):
    """Return the list that a console of this width prints."""
    console = TerminalConsole(width=width, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print_list("things", ("name", "what"), rows, "the end")
    return captured.get()


TWENTY_LETTERS = "a" * 20
# Its words have 20 and 5 letters at most; beside them a table has two borders of 3 characters and the last line.
ROWS = [(TWENTY_LETTERS, "short words only"), ("b", "")]


def test_a_table_is_printed_where_every_word_fits():
    output = print_list(32, ROWS)
    assert "┃" in output
    assert f"│ {TWENTY_LETTERS} │" in output


def test_lines_are_printed_where_a_word_does_not_fit():
    output = print_list(31, ROWS)
    assert output.splitlines() == ["things", TWENTY_LETTERS, "    what: short words only", "b", "the end"]


def test_no_line_of_a_table_is_longer_than_the_console():
    output = print_list(40, [("name_of_a_thing", "some words " * 20), ("b", "x")])
    assert max(len(line) for line in output.splitlines()) == 40
