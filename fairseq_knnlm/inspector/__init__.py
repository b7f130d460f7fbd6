"""A page that shows what was retrieved for each token of a text, as a file or live on a loopback port."""
