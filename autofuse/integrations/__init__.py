"""Where autofuse meets other libraries' loops; each is imported only when it is used."""
