"""Page readers: vision-language models that write the text of a page."""
