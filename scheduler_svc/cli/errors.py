"""What a command says where it cannot go on."""


class CommandError(Exception):
    """The text is one plain line; the command ends with it and status 1."""
