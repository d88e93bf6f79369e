"""Demo of the server: a small model over HTTP, queried with curl and OpenAI's client, then shut down."""

import sys

from levanter.commands.serve.demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
