"""The page: looks at images and their results, searches them, and processes them again. A process of its own, so that
whoever looks never slows down the work; it reads the ledger, and asks the daemon for changes."""
