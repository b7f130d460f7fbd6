from setuptools import find_packages, setup
setup(name="fairseq-knnlm", version="0.1.0", packages=find_packages(include=["fairseq_knnlm*"]))
