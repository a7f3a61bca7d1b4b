#!/bin/sh
# A configuration in DIR/nginx.conf, for PORT.
set -eu
head -c 1024 /dev/zero | tr '\0' x >"$1/file"
chmod 755 "$1"
cat >"$1/nginx.conf" <<CONF
daemon off; worker_processes 2; pid $1/pid; error_log $1/error.log;
events { worker_connections 4096; }
http {
    access_log off; client_body_temp_path $1/a; proxy_temp_path $1/b; fastcgi_temp_path $1/c; uwsgi_temp_path $1/d; scgi_temp_path $1/e;
    server { listen 127.0.0.1:$2 reuseport; root $1; keepalive_requests 100000000; }
}
CONF
