"""`hfpaged serve` with replicas whose number follows the load at once, and with an end that does not wait long for one
that finds no place: for tests, which cannot wait for averages.
"""

import os
import sys

from hfpaged.cli import main
from hfpaged.replicas import ending, scaling

scaling.LOOK_BACK_SECONDS, scaling.UP_SECONDS = 2.0, 0.5
scaling.DOWN_SECONDS = float(os.environ.get("DOWN_SECONDS", scaling.DOWN_SECONDS))
ending.LOOK_SECONDS, ending.DELETING_SECONDS = 1.0, 1.0

sys.exit(main(["serve", *sys.argv[1:]]))
