"""Foreign text in messages: what comes from a file, a folder or a command line, made safe for terminals and logs."""

LONGEST = 80  # characters of foreign text that a message repeats
LONGEST_LINE = 1000  # characters of a line of a message


def echo(text: object, *, longest: int = LONGEST) -> str:
    """Returns `text` on one line, unprintable characters escaped, truncated after `longest` characters."""
    whole = str(text)
    cut = whole[:longest]
    return "".join(map(_visible, cut)) + (f"... ({len(whole):,} characters)" if len(whole) > longest else "")


def visible(message: object) -> str:
    """Returns a message whose lines are each escaped and, if very long, truncated as by `echo`.

    The last resort for messages that contain foreign text unescaped.
    """
    return "\n".join(echo(line, longest=LONGEST_LINE) for line in str(message).split("\n"))


def has_surrogates(text: str) -> bool:
    """Tells whether `text` cannot be encoded as UTF-8: undecodable bytes, or half a surrogate pair."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _visible(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
