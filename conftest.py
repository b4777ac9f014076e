"""What pytest must know before it collects anything: `pytester` (tests of the pytest plugin) only loads from here."""

pytest_plugins = ["pytester"]
