"""The stage classifier: the scores of an image by any `…ForImageClassification` of transformers."""
