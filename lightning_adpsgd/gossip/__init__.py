"""The asynchronous engine. Begin with `engine`; its docstring lists the other files."""
