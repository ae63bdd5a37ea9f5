"""Triton's interpreter, which stands for a GPU in tests, mended where a release that a supported torch pins fails."""

from triton.runtime import interpreter


def squeeze_indices() -> None:
    """Let loops of interpreted kernels have bounds that are tensors, on Triton 3.6 with NumPy 2.5 or later.

    There Triton turns an array of one number into an int, which NumPy refuses ("only 0-dimensional arrays can be
    converted to Python scalars"). Later releases of Triton squeeze the array first, as is done here.
    """
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    interpreter._patch_lang_tensor = patched
