"""``python -m autogemm`` is the command line."""

from .cli.main import main

main()
