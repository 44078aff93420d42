#!/bin/sh
# Makes the certificates of this folder: a CA, and what it signed for a server at 127.0.0.1 and for a client.
set -eu
cd "$(dirname "$0")"
new_key() { openssl ecparam -name prime256v1 -genkey -noout -out "$1.key"; }
new_key ca
openssl req -x509 -new -key ca.key -days 36500 -subj "/CN=Phloem tests" -out ca.pem \
  -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
for name in server client; do
  new_key "$name"
  printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n' >extensions
  openssl req -new -key "$name.key" -subj "/CN=$name" | openssl x509 -req -CA ca.pem -CAkey ca.key \
    -set_serial "$(od -An -N8 -tu8 /dev/urandom | tr -d ' ')" -days 36500 -extfile extensions -out "$name.pem"
done
openssl ec -in server.key -aes256 -passout pass:secret -out encrypted.key
rm extensions ca.key
