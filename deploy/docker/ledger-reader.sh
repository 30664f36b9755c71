#!/bin/sh
# Run once by the PostgreSQL image, when it makes the database: a user for Grafana, who may read the
# tables that the gateway will make, and nothing else. (Of a key they hold its digest only.)
set -eu
psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" <<'SQL'
\getenv password LEDGER_READER_PASSWORD
CREATE ROLE ledger_reader LOGIN PASSWORD :'password';
GRANT USAGE ON SCHEMA public TO ledger_reader;
ALTER DEFAULT PRIVILEGES IN SCHEMA public GRANT SELECT ON TABLES TO ledger_reader;
SQL
