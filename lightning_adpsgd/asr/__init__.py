"""Speech recognition: from recorded conversations to a word error rate.

Each module is imported by its own name; nothing here is imported by the core package.
"""
