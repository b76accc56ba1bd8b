# SPDX-License-Identifier: Apache-2.0
"""DistrAttention within other packages. Nothing is imported here: each module imports the package that it serves."""
