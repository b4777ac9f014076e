def pytest_configure() -> None:
    pass
