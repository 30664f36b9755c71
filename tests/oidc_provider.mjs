// A provider of the registry's `oidc-provider`: node server.mjs PORT. In the environment are KEYS, its private
// keys; ISSUER; PEOPLE, claims by name; and CONSOLES, addresses of those whose people sign in, by client ID.

import Provider from "oidc-provider";

const port = Number(process.argv[2]);
const keys = JSON.parse(process.env.KEYS);
const people = JSON.parse(process.env.PEOPLE ?? "{}");
const consoles = Object.entries(JSON.parse(process.env.CONSOLES ?? "{}"));
const resourceServer = {
  audience: "vllm-gateway",
  scope: "",
  accessTokenFormat: "jwt",
  accessTokenTTL: 600,
  jwt: {sign: {alg: keys[0].alg, kid: keys[0].kid}},
};
const clients = [{
  client_id: "agent",
  client_secret: "the-secret-of-agent",
  grant_types: ["client_credentials"],
  redirect_uris: [],
  response_types: [],
}];
for (const [id, address] of consoles) {
  clients.push({
    client_id: id,
    client_secret: "the-secret-of-console",
    grant_types: ["authorization_code"],
    response_types: ["code"],
    redirect_uris: [`${address}/console/login/oidc/callback`],
    post_logout_redirect_uris: [`${address}/console/login`],
    backchannel_logout_uri: `${address}/console/logout/oidc`,
    backchannel_logout_session_required: true,
    id_token_signed_response_alg: keys[0].alg,
  });
}

const provider = new Provider(process.env.ISSUER, {
  jwks: {keys},
  clients,
  // Its own refuses addresses of this machine.
  fetch: (url, {dispatcher, ...options}) => fetch(url, options),
  // Claims of a scope are not in the ID token: they are asked for at the userinfo endpoint.
  claims: {openid: ["sub"], profile: ["name", "groups", "team"]},
  findAccount: (context, id) => ({accountId: id, claims: () => ({sub: id, ...people[id]})}),
  features: {
    backchannelLogout: {enabled: true},
    clientCredentials: {enabled: true},
    devInteractions: {enabled: consoles.length > 0},
    resourceIndicators: {
      enabled: true,
      defaultResource: (context, client) => (client.clientId === "agent" ? "https://gateway.example/" : undefined),
      getResourceServerInfo: () => resourceServer,
    },
  },
  extraTokenClaims: () => ({team: "research"}),
});
provider.on("backchannel.error", (context, error) => console.error(error));
provider.listen(port, "127.0.0.1");
