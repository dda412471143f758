"""The kind of error that is the user's: a command prints it without a traceback."""


class UserFault(ValueError):
    """What the user gave or wrote is wrong, found while something runs."""
