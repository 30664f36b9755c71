#!/bin/sh
# The PostgreSQL image runs this once, when it creates the database. It adds a user for Grafana that
# can only read the gateway's tables. (They hold digests of keys, not keys.)
set -eu
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\getenv password LEDGER_READER_PASSWORD
CREATE ROLE ledger_reader LOGIN PASSWORD :'password';
GRANT USAGE ON SCHEMA public TO ledger_reader;
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO ledger_reader;
SQL
