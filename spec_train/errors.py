"""The exceptions that a user is meant to read."""


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and how to mend it. The CLI exits with status 2."""


class RunFailure(RuntimeError):
    """A run that was asked for rightly and went wrong: training diverged, an export does not serve. The message says
    what and where; the CLI exits with status 1."""
