"""``python -m kernreg``."""

from kernreg.cli import main

if __name__ == "__main__":
    main()
