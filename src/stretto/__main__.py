"""``python -m stretto``: the same as the ``stretto`` command."""

import sys

from stretto.cli.main import main

sys.exit(main())
