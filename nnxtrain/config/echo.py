"""Foreign text in messages: what a file, a folder or a command line holds, made safe for a terminal and a log."""

LONGEST = 80  # characters of foreign text that a message repeats
LONGEST_LINE = 1000  # characters of a line of a message


def echo(text: object, *, longest: int = LONGEST) -> str:
    """Returns `text` on one line with everything unprintable escaped, cut after `longest` characters."""
    whole = str(text)
    cut = whole[:longest]
    return "".join(map(_visible, cut)) + (f"... ({len(whole):,} characters)" if len(whole) > longest else "")


def visible(message: object) -> str:
    """Returns a message for people, its lines still lines; each is escaped and, where it is endless, cut as by `echo`.

    The last resort for messages that repeat foreign text as it came.
    """
    return "\n".join(echo(line, longest=LONGEST_LINE) for line in str(message).split("\n"))


def has_surrogates(text: str) -> bool:
    """Tells whether `text` holds what no UTF-8 can: bytes of a command line that were none, or half a character."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
