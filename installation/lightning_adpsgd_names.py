"""What torch calls in the middle of its own import; it never fails.

`lightning_adpsgd.registration` makes the strategy names known. An error on the way
there (an editable clone that was moved, a package that does not compile) would end
every `import torch` of the environment. Here it becomes a warning. This module lies
beside the package and by itself, so that it is there whatever has become of that.
`TORCH_DEVICE_BACKEND_AUTOLOAD=0` keeps torch from calling it.
"""

import warnings
from contextlib import suppress


def install() -> None:
    """Has the strategy names registered, or warns why they are not."""
    try:
        from lightning_adpsgd.registration import install as register

        register()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also of a module that calls `sys.exit`
        _warn(error)


def _warn(error: BaseException) -> None:
    with suppress(Exception):  # warnings may be made errors
        warnings.warn(
            "Lightning does not know the strategies of lightning_adpsgd: "
            f"{type(error).__name__}: {error}. If the clone that it was installed from "
            "was moved, install it again from there, or `pip uninstall "
            "lightning-adpsgd`; TORCH_DEVICE_BACKEND_AUTOLOAD=0 turns this off",
            RuntimeWarning,
            stacklevel=2,
        )
