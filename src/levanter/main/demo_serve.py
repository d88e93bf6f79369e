"""The demonstration of a server: a small model over HTTP, asked by curl and by OpenAI's client, then told to end."""

import sys

from levanter.commands.serve.demo import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
