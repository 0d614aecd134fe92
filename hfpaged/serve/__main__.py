"""`python -m hfpaged.serve`, the same as `hfpaged serve`."""

import sys

from hfpaged.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
