# SPDX-License-Identifier: Apache-2.0
"""`python -m distrattention doctor`."""

import sys


def main(arguments=None):
    """Runs the command; returns the exit status."""
    from distrattention import doctor

    return doctor.main(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
