"""The report: one self-contained page that explains a plan, offline. `document` puts it together; the script and style files are its own."""
