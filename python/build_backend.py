# SPDX-License-Identifier: Apache-2.0
"""scikit-build-core, with progress on the terminal, asking for torch only where its headers are not at hand.

The binding needs torch's headers, and no more of it, to build. Who runs `pip install .` often has torch in the very
environment that is installed into; a plain build requirement would still download it, with all of its CUDA libraries,
into the isolated build environment. So we look there first, as files: torch is never imported.
"""

import sys
import sysconfig
from pathlib import Path

TORCH = "torch>=2.10"


def torch_include():
    """torch's include folder, of this interpreter's environment or of the build environment; None: there is none."""
    for folder in (sysconfig.get_path("platlib"), sysconfig.get_path("purelib"), *sys.path):
        include = Path(folder) / "torch" / "include"
        if (include / "torch" / "csrc" / "stable" / "library.h").is_file():
            return include
    return None


if __name__ == "__main__":
    print(torch_include() or "")
else:
    import build_progress
    from scikit_build_core import build as _build
    from scikit_build_core.build import *  # noqa: F403

    def build_wheel(*arguments, **options):
        with build_progress.shown():
            return _build.build_wheel(*arguments, **options)

    def build_editable(*arguments, **options):
        with build_progress.shown():
            return _build.build_editable(*arguments, **options)

    def get_requires_for_build_wheel(config_settings=None):
        """What a wheel needs to build: scikit-build-core's list, and torch unless its headers are there."""
        named = any("DISTR_TORCH_INCLUDE" in setting for setting in config_settings or ())
        requires = _build.get_requires_for_build_wheel(config_settings)
        return requires if named or torch_include() else [*requires, TORCH]

    get_requires_for_build_editable = get_requires_for_build_wheel
