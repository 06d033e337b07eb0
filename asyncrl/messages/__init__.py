"""Every record that crosses a part or a process, once. Knows no torch."""
