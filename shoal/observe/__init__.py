"""What happened: spans, reports, verification."""
