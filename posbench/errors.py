"""The one error a user can cause, printed as one line."""


class UserError(Exception):
    """Bad input: names the field, its value, what is allowed and the next step.

    The command line prints ``str(error)`` and exits with status 2.

    Args:
        field: Dotted name of the config field, argument or file.
        value: What was given.
        allowed: What would have been accepted.
        hint: The next step for the user.
    """

    def __init__(self, *, field: str, value: object, allowed: str, hint: str) -> None:
        self.field, self.value, self.allowed, self.hint = field, value, allowed, hint
        super().__init__(str(self))

    def __str__(self) -> str:
        line = f"{self.field} = {self.value!r}: allowed: {self.allowed}; next: {self.hint}"
        return " ".join(line.split())
