"""More than one machine: a datastore's inverted lists, its dump and its index spread over the nodes of a Ray cluster.

Ray is an extra (``pip install 'fairseq-knnlm[ray]'``), so it is imported only where it is asked for.
"""
