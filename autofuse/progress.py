"""A live line."""


class Progress:
    """Placeholder."""

    def update(self, text: str) -> None:
        """Show."""

    def close(self) -> None:
        """End."""
