"""The environment variables of this distribution, read when asked for and never at import."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """Returns where compiled kernels are kept between processes.

    `RATOON_KERNELS_CACHE`, else "ratoon/kernels" in `XDG_CACHE_HOME`, else in ~/.cache. None where
    neither is set and this user has no home.
    """
    own = os.environ.get("RATOON_KERNELS_CACHE")
    if own:
        return Path(own)
    xdg = os.environ.get("XDG_CACHE_HOME")
    try:
        caches = Path(xdg) if xdg else Path.home() / ".cache"
    except RuntimeError:
        return None
    return caches / "ratoon" / "kernels"
