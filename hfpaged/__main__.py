"""`python -m hfpaged`, the same as `hfpaged`."""

import sys

from hfpaged.cli import main

sys.exit(main())
