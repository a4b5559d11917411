"""Errors of this distribution: a call that is wrong, and a backend that cannot serve it.

Both are raised before any kernel runs, so nothing was computed and no output exists.
"""


class KernelArgumentError(ValueError):
    """An argument of an op or of the layout builder is wrong.

    Attributes:
        argument: The parameter's name as the caller writes it.
        problem: What came and what was expected.
    """

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        self.problem = problem


class BackendUnavailableError(RuntimeError):
    """No backend, or not the one asked for by name, can serve the call on this machine.

    Attributes:
        op: Name of the op.
        backend: Name of the backend asked for, or "any" where none was.
        reason: What is missing.
    """

    def __init__(self, op: str, backend: str, reason: str) -> None:
        super().__init__(f"{op} backend {backend!r} is unavailable: {reason}")
        self.op = op
        self.backend = backend
        self.reason = reason
