"""`python -m levanter X …` is `levanter X …`."""

import sys

from levanter.main.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
