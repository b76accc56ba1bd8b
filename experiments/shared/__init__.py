# SPDX-License-Identifier: Apache-2.0
"""What the scripts of the paper's tables and figures share."""
