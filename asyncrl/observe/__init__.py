"""The numbers of a run: declared, written, shown, judged and read back."""
