"""`python -m keras_turbo`: hands the command line to the launcher."""

from __future__ import annotations

import sys

from keras_turbo import launch

if __name__ == "__main__":
    launch.main(sys.argv[1:], "python -m keras_turbo")
