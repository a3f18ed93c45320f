"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and how to mend it. The CLI exits with status 2."""
