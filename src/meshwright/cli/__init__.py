"""The command line: `meshwright <noun> <verb>`. One module per command, imported when used."""
