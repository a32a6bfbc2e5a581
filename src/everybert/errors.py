"""The one error users meet: a cause and a remedy in one line, never a traceback on the command line."""


class EverybertError(ValueError):
    """Something the user can fix. The message names the cause and the remedy.

    The command line prints it as one line and exits with code 2; Python users catch it as a ValueError.
    """


def one_line(error: BaseException, most: int = 160) -> str:
    """The message of another library's error, short and without line ends."""
    return " ".join(str(error).split())[:most] or type(error).__name__
