"""`visiond bench`: the standard job, measured."""
