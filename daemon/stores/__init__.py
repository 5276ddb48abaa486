"""Object stores: their URLs, how they are opened, and what their errors mean."""
