"""No loader: torch's class is not here."""
