"""Errors of the CUDA layer: a kernel that does not compile, a call of CUDA that fails.

Each names what was attempted and carries CUDA's own words for what went wrong.
"""


class KernelCompileError(RuntimeError):
    """NVRTC refused a kernel.

    Attributes:
        kernel: Name of the spec.
        log: The compiler's messages.
    """

    def __init__(self, kernel: str, log: str) -> None:
        super().__init__(f"kernel {kernel} does not compile:\n{log}")
        self.kernel = kernel
        self.log = log


class CudaCallError(RuntimeError):
    """A call of the CUDA driver or of NVRTC failed.

    Attributes:
        call: The function's name, and what it was called for.
        code: Its status code.
        description: The status in CUDA's words.
    """

    def __init__(self, call: str, code: int, description: str) -> None:
        super().__init__(f"{call} failed with {code}: {description}")
        self.call = call
        self.code = code
        self.description = description
