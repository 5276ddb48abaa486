"""Everything that is answered over HTTP: metrics, status, requests, and the page."""
